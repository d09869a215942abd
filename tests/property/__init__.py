"""Properties that hold for every input, tested on random data from Hypothesis and on the edges of each format."""
