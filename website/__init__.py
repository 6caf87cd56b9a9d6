"""The documentation site beside docs/: hooks of mkdocs, generated pages, pictures and curves. Not a part of the installed package.

python -m website.curves      runs every algorithm on the standard task and writes curves.json (minutes); with names, those alone: for a new algorithm
python -m website.facts       the runs behind two pictures, into facts.json (a minute)
python -m website.pictures    draws docs/pictures/*.svg from both
python -m website.quotes      runs the code on pages and writes what it prints into them
make docs                     builds site/
"""
