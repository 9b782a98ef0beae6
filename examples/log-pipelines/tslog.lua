-- Turns a record of the parsers `pharos_tslog` and `pharos_tslog_json` into a sample:
-- logger, name, unit, value, type, dimensions (a map), host, request_ids (a list), with the time of the line.

-- Text has no types. Add the names of your counters here; --tslog-format=json has them.
local COUNTERS = { "^Requests[245]XX$", "^ts_", "_total$" }

local function decode(text)
    return (text:gsub("%%(%x%x)", function(digits) return string.char(tonumber(digits, 16)) end))
end

-- Calls `each` with the parts of a text between commas.
local function split(text, each)
    for part in (text .. ","):gmatch("([^,]*),") do
        each(part)
    end
end

local function type_of(name)
    for _, pattern in ipairs(COUNTERS) do
        if name:find(pattern) then return "counter" end
    end
    return "gauge"
end

-- Returns one id for each request of a batch, empty for a request without one.
local function ids(text)
    local list = {}
    if text == nil or text == "null" then return list end
    split(text, function(id) list[#list + 1] = id == "null" and "" or decode(id) end)
    return list
end

local function from_text(record)
    local sample = {
        -- Only lines of model metrics have request ids.
        logger = record.request_ids and "MODEL_METRICS" or "TS_METRICS",
        name = record.name,
        unit = decode(record.unit or ""),
        value = tonumber(record.value) or record.value,
        type = type_of(record.name),
        dimensions = {},
        host = decode(record.host),
        request_ids = ids(record.request_ids),
    }
    split(record.dimensions or "", function(pair)
        local name, value = pair:match("^([^:]*):(.*)$")
        if name then sample.dimensions[decode(name)] = decode(value) end
    end)
    local milliseconds = tonumber(record.time:match(",(%d+)$"))
    return sample, record.seconds + milliseconds / 1000
end

local function from_json(record)
    local sample = {
        logger = record.Logger,
        name = record.MetricName,
        unit = record.Unit,
        value = record.Value,
        type = record.Type:lower(),
        dimensions = {},
        host = record.HostName,
        request_ids = ids(record.RequestId),
    }
    for _, pair in ipairs(record.Dimensions) do
        sample.dimensions[pair.Name] = pair.Value
    end
    return sample, record.Timestamp
end

-- The result 1 replaces the time and the record; 0 keeps a record that is no sample.
function sample(tag, timestamp, record)
    local found, time
    if record.MetricName then
        found, time = from_json(record)
    elseif record.name and record.value then
        found, time = from_text(record)
    else
        return 0, timestamp, record
    end
    return 1, time, found
end
