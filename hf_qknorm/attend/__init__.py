"""Attention functions, masks and static caches: transformers' contract for attention."""
