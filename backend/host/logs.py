"""Log records as JSON: one object a line, with the fields that a record brings along."""

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """What a record's `fields` hold (logger.info(..., extra={"fields": {...}})) stands beside its
    time, level and message."""

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
