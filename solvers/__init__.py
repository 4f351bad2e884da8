"""Solvers: plain numbers in, plain numbers out. Nothing here knows torch, graphs or meshes."""
