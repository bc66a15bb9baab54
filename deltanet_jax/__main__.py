"""`python -m deltanet_jax`: the console script `deltanet`."""

from deltanet_jax.cli import main

if __name__ == "__main__":
  main()
