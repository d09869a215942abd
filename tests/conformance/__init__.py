"""Conformance: detent compared with an exact oracle and with other libraries.

The helpers (`exact`, `philox`, `oracle`, `ranges`, `ties`, `grid`) share no code with `src/detent`. They are a slow,
simple implementation of docs/numerics.md alone, so an error would have to be made twice to stay undetected.
"""
