"""`python -m bloomery.models.native` compiles the kernels, where they can be, and says whose they are."""

from bloomery.models.native import bindings

if __name__ == "__main__":
    print(f"kernels: {bindings.identity()}")
