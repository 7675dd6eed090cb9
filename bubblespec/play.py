"""Former name of a command."""

if __name__ == "__main__":
    raise SystemExit("error: python -m bubblespec.play is now python -m bubblespec play")
