CREATE TABLE IF NOT EXISTS evaluations (key TEXT PRIMARY KEY, facts TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS answers (
    key TEXT, position INTEGER, sample INTEGER, suite TEXT, setting TEXT, item TEXT, "group" TEXT, prompt TEXT,
    gold TEXT, completion TEXT, extracted TEXT, verdict TEXT, score REAL, format_and_answer TEXT, tokens INTEGER,
    finish_reason TEXT, seconds REAL, reason TEXT, episode TEXT,
    PRIMARY KEY (key, position, sample)
) WITHOUT ROWID;
