"""A judged run as people and programs read it: text, JSON, JUnit, a Chaos Toolkit journal, one HTML page."""
