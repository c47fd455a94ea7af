"""The transfer engine: one transport a file, behind one Protocol."""
