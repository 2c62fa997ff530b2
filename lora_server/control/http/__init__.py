"""Health, metrics and a page over HTTP.

server  one process's answers                       page/  a live web page
limits  of time, size and connections per request
"""
