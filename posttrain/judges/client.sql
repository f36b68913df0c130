CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT, content TEXT, finish_reason TEXT, prompt_tokens INTEGER,
    completion_tokens INTEGER, seconds REAL, created REAL
) WITHOUT ROWID
