"""The verbs: what torchrun starts (``python -m cpkit.launch``) and the ``cpkit`` command."""

if __name__ != "cpkit.launch":
    raise ImportError(f"this folder is the package cpkit.launch, imported here as {__name__!r}: import cpkit.launch")
