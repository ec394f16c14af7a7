"""`hf-qknorm demo`: train, convert, continue, compare, plot. No download."""
