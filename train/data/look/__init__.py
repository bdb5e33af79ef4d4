"""What is wrong with records, how long documents are, what a person sees of them."""
