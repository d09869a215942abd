"""Golden tests: what five public quantization systems document, as tables of hand-made numbers and as behaviour.

``test_tables`` runs the TOML tables, whose form ``tables`` describes; one test file per system holds the documented
behaviour that no table can say. No expected number was made by running detent.
"""
