"""Conformance: detent against an exact oracle and against other people's implementations.

The helpers (`exact`, `philox`, `oracle`, `ranges`, `ties`, `grid`) share no code with `src/detent`; they
are written from the numeric contract alone, slowly and obviously, so that an error has to be made twice to
go unseen.
"""
