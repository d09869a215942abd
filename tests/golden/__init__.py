"""Golden tests: the documented behavior of five public quantization systems.

``test_tables`` runs the TOML tables of numbers, whose format is described in ``tables``. One test file per system
covers documented behavior that is not in a table. All expected numbers were computed by hand, none by running detent.
"""
