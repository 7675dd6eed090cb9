"""Can this machine run a configuration? python -m bubblespec doctor"""
