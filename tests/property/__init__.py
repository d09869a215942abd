"""What holds for every input: laws of the operators, tried on data that Hypothesis and the format's edges supply."""
