#include "../memlean.h"

const char *memlean_status_string(memlean_status status)
{
    switch (status) {
    case MEMLEAN_OK:
        return "success";
    case MEMLEAN_EARGUMENT:
        return "a size, stride, dtype or pointer is not valid";
    case MEMLEAN_EINDEX:
        return "an index is outside the vocabulary";
    case MEMLEAN_ETEMPERATURE:
        return "a temperature is not finite and positive";
    case MEMLEAN_EKEPT:
        return "a kept token is outside the vocabulary";
    case MEMLEAN_EOFFSETS:
        return "offsets of kept tokens do not rise from 0 to their number";
    case MEMLEAN_EISA:
        return "the instruction set is unknown, or not available on this CPU";
    }
    return "unknown status";
}
