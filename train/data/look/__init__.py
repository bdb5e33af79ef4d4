"""Looking at data: faults of records, lengths of documents, documents as text."""
