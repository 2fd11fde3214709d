"""The words of a version that several ranks make and code together."""
