"""How settings are read: files, presets, inheritance, interpolation, overrides, flags, errors."""
