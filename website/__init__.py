"""The documentation site: hooks of mkdocs, generated pages, equations, pictures and curves.

It is not part of the installed package.

    python -m website.curves       runs every algorithm, or the named ones, and writes curves.json (minutes)
    python -m website.facts        makes the runs behind two pictures and writes facts.json (a minute)
    python -m website.pictures     draws docs/pictures/*.svg from both
    python -m website.screenshot   runs the demo and writes docs/pictures/report.png (needs Chromium)
    python -m website.quotes       runs the code on pages and in the README and writes the output into them
    make docs                      builds site/
"""
