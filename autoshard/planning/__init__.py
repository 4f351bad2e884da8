"""Strategies and hardware in, plan out."""
