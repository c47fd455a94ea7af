"""Pure parsers: text in, value or ParseError out, whatever the text is."""
