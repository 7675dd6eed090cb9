"""Former name of a command."""

if __name__ == "__main__":
    raise SystemExit("error: python -m bubblespec.simulate is now python -m bubblespec simulate")
