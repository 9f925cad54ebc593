"""Small apps that uvicorn runs in the tests, and their models."""
