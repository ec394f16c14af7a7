"""`hf-qknorm demo`: train, convert, continue training, compare. Downloads nothing."""
