"""GPU kernels in Triton: the kernels, their launches, and the self-check that decides whether they run.

Not yet run on a GPU. Tests run the kernels in Triton's interpreter and check the code that Triton generates.
"""

__all__: list[str] = []
