"""Can this machine run a configuration? python -m bubblespec.doctor

May import: all other parts of the package.
"""
