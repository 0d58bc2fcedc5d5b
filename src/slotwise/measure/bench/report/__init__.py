"""The report of a comparison of disciplines: an HTML page, and tables for a terminal."""
