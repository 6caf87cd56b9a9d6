"""Results for people: tables in a terminal, and one page in a browser.

    tables.py         tables and sentences in a terminal
    page.py           `write_report`: page.html, page.css, page_*.js, plotly and content in one file
    page_data.py      content of the page as plain numbers and words, from
                      record_files.py, page_runs.py, page_curves.py and page_studies.py
    watch.py          the same page, served to this machine while a run continues
    operating.py      the page of a site's operator

The page reads only JSON files of records and needs no torch.
"""

from fedbilevel.report.page import write_report

__all__ = ["write_report"]
