"""API keys, which stand in files or environment variables and never in the configuration."""

from pathlib import Path

from node.errors import StartupError


def api_key_in(path: Path, *, setting: str) -> str:
    """Return the key that a file holds.

    Args:
        setting: What names the file.
    Raises:
        StartupError: the file cannot be read, or holds no single line of ASCII.
    """
    fix = f"Correct {setting}."
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The file {path} has no API key that can be read: {error}", fix=fix) from error
    return checked_key(text, where=f"The file {path}", fix=fix)


def checked_key(text: str, *, where: str, fix: str) -> str:
    """Return ``text`` without the blanks around it.

    Raises:
        StartupError: it is no single line of ASCII.
    """
    key = text.strip()
    if not (key.isascii() and key.isprintable() and key):
        raise StartupError(f"{where} has no API key: it must be one line of ASCII", fix=fix)
    return key
