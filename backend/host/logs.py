"""Log records as JSON: one object per line, with each record's extra fields."""

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """Writes time, level and message, and a record's `fields`:

    logger.info(..., extra={"fields": {...}})
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
