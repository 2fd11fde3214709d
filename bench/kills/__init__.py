"""The command ``python -m bench.kills``: see ``bench.kills.__main__``.

A package, since a process that multiprocessing forks imports the module of a command again, unless it is a
package's ``__main__``.
"""
