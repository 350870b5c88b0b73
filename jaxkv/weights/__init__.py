"""Checkpoints on disk and on the hub: found, checked and read without executing anything they
hold.
"""
