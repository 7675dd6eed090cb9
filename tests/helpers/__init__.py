"""What several test files use: import it as `tests.helpers.NAME`."""
