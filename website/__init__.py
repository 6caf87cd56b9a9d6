"""The documentation site: hooks of mkdocs, generated pages, equations, pictures and curves. The installed package does not contain it.

python -m website.curves      runs every algorithm on the standard task and writes curves.json (minutes); with names, only those algorithms
python -m website.facts       makes the runs of two pictures and writes facts.json (a minute)
python -m website.pictures    draws docs/pictures/*.svg from both
python -m website.quotes      runs the code on pages and writes its output into them
make docs                     builds site/
"""
