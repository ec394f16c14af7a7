"""Attention on the CPU in C++, which is compiled at its first use on a machine with a compiler."""
