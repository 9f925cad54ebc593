"""The status page of batchers: what is wrong with them, and their figures of the last minutes.

    recorder    an observer of each batcher, which keeps five minutes of events in slots
    problems    what is wrong, in plain words, worst first
    report      the page's data, as JSON
    streams     the open pages, which must not keep the server from ending
    router      the routes

API process, on its event loop. The page itself is `page.html`, `style.css` and `script.js`.
"""

from fast_batcher.fastapi.status.router import status_router

__all__ = ["status_router"]
