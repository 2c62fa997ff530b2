"""What a server keeps for good, whoever dies: in a file of SQLite, or in a PostgreSQL that several servers share.

database   where it is, its schema, transactions
drains     what goes, and until when
attempts   updates that did not come to their end
versions   what names mean, and meant before; what adapters of a directory were
"""
