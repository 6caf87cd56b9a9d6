"""One page in a browser that shows what runs did: `write_report` writes it as a file, `watch` serves it while a run goes on.

Only JSON files of records are read, and nothing here needs torch.

    content.py    what records say, as plain numbers and words
    writing.py    page.html, page.css, page.js, plotly's script and the content, joined into one file that asks for nothing from outside
    watching.py   the same page from this machine for this machine, with content that is read again
"""

from fedbilevel.report.page import write_report

__all__ = ["write_report"]
