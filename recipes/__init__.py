"""Recipes: one YAML file a supported combination of model, hardware, topology and options. Data only."""

if __name__ != "cpkit.recipes":
    raise ImportError(f"this folder is the package cpkit.recipes, imported here as {__name__!r}: import cpkit.recipes")
