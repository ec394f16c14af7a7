"""What tests share: tiny models, cases, and programs that they start."""
