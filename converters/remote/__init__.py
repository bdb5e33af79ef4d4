"""Storage that is not a folder: objects of S3, Google Cloud, Azure and web servers, and the Hub, by ranges."""
