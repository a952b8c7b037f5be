"""Fixes for installed trainers, applied from outside: one file per trainer, the bookkeeping in `_patch`."""
