/* comm_join.c - how a HostComm joins its peers: connect() joins those of its host; extend() joins
 * other hosts, given a map of hosts and a wire between their carriers. */
#include <unistd.h>

#include "comm/shm.h"
#include "python/method.h"

/* The arguments of connect(), all read before the rank joins. */
typedef struct join_request {
    sw_py_table addresses, hosts, members; /* one row for each rank of this host */
    PyObject *by_rank;                     /* owned: the host name of each rank */
    bool is_narrow;                        /* `members` are some of the ranks */
} join_request;

static void join_request_fini(join_request *request)
{
    sw_py_table_fini(&request->addresses);
    sw_py_table_fini(&request->hosts);
    sw_py_table_fini(&request->members);
    Py_XDECREF(request->by_rank);
}

/* Reads the ranks of this host, which are ascending and include this one. */
static bool read_members(join_request *request, const comm_object *self, PyObject *members)
{
    sw_py_table *table = &request->members;
    bool has_own = false, ascends = true;
    request->is_narrow = members && members != Py_None;
    if (!request->is_narrow)
        return true;
    if (!sw_py_table_init(table, members, "connect members:i", sizeof(int), sw_py_fill_int, NULL))
        return false;
    const int *member = table->rows;
    for (size_t i = 0; i < table->count; ++i) {
        has_own |= member[i] == self->rank;
        ascends &= member[i] > (i ? member[i - 1] : -1) && member[i] < self->world_size;
    }
    if (!has_own || !ascends)
        PyErr_Format(
            PyExc_ValueError,
            "connect: members must be ranks in [0, %d), ascending, with rank %d among them",
            self->world_size, self->rank);
    return has_own && ascends;
}

static bool read_addresses(join_request *request, const comm_object *self, PyObject *addresses,
                           PyObject *hosts)
{
    size_t count = request->is_narrow ? request->members.count : (size_t)self->world_size;
    if (!sw_py_table_init(&request->addresses, addresses, "connect addresses:s",
                          sizeof(const char *), sw_py_fill_text, NULL) ||
        !sw_py_table_init(&request->hosts, hosts, "connect hosts:s", sizeof(const char *),
                          sw_py_fill_text, NULL))
        return false;
    return (request->addresses.count == count && request->hosts.count == count) ||
           sw_py_refuse(PyExc_ValueError,
                        "connect: addresses and hosts must have %zu entries, got %zu and %zu",
                        count, request->addresses.count, request->hosts.count);
}

/* Makes the host name of each rank, empty for ranks of other hosts. */
static bool name_hosts(join_request *request, int world_size)
{
    const int *member = request->members.rows;
    Py_ssize_t i = 0;
    request->by_rank = PyList_New(0);
    for (int r = 0; request->by_rank && r < world_size; ++r) {
        bool is_here =
            !request->is_narrow || ((size_t)i < request->members.count && member[i] == r);
        PyObject *name = is_here ? PyTuple_GetItem(request->hosts.items, i++) : NULL;
        Py_XINCREF(name);
        sw_py_append(&request->by_rank, name ? name : PyUnicode_FromString(""));
    }
    return request->by_rank != NULL;
}

static sw_status join(sw_comm *comm, const join_request *request, const uint8_t *secret,
                      sw_error *err)
{
    if (request->is_narrow)
        SW_TRY(sw_shm_comm_narrow(comm, request->members.rows, (int)request->members.count, err));
    return sw_shm_comm_connect(comm, request->addresses.rows, secret, err);
}

/* Joins the ranks of this host. No other thread can use the communicator meanwhile, but hooks run,
 * and close() may stop it. */
static sw_status join_host(comm_object *self, const join_request *request, const uint8_t *secret,
                           sw_error *err)
{
    sw_comm *comm = self->comm;
    self->comm = NULL;
    sw_status status = SW_PY_WITHOUT_GIL(join(comm, request, secret, err));
    self->comm = comm;
    self->connected = status == SW_OK;
    return status;
}

static PyObject *finish_join(comm_object *self, sw_status status, sw_error *err)
{
    if (status == SW_OK && self->closed)
        status = sw_error_set(err, SW_E_STATE, -1,
                              "the communicator of rank %d was closed while it joined its peers",
                              self->rank);
    return sw_py_comm_finish(self, status, err);
}

PyObject *sw_py_comm_connect(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[4] = {{0}};
    join_request request = {.is_narrow = false};
    sw_error err;
    sw_status status = SW_OK;
    if (!sw_py_read("connect addresses:O secret:B hosts:O | $ members:O", args, kwargs, a))
        return NULL;
    if (PyBytes_Size(a[1].o) != SW_SHM_SECRET_BYTES)
        return PyErr_Format(PyExc_ValueError, "connect: secret must have %d bytes, got %zd",
                            SW_SHM_SECRET_BYTES, PyBytes_Size(a[1].o));
    if (!sw_py_comm_enter_to_join(self))
        return NULL;
    bool is_read = read_members(&request, self, a[3].o) &&
                   read_addresses(&request, self, a[0].o, a[2].o) &&
                   name_hosts(&request, self->world_size);
    if (is_read) {
        sw_py_set(&self->hosts, request.by_rank);
        if (!self->group)
            status = join_host(self, &request, (const uint8_t *)PyBytes_AsString(a[1].o), &err);
    }
    join_request_fini(&request);
    if (is_read)
        return finish_join(self, status, &err);
    sw_py_comm_leave(self);
    return NULL;
}

/* Returns the host name of each rank as the carriers exchanged them; NULL with an exception. */
static PyObject *introduced_hosts(const sw_comm *comm)
{
    const sw_host_map *map = sw_hier_comm_map(comm);
    PyObject *made = PyList_New(map->world_size);
    for (int h = 0; made && h < map->host_count; ++h) {
        SW_PY_OWNED *name = sw_py_text(sw_hier_comm_host(comm, h));
        for (int i = 0; made && i < sw_host_size(map, h); ++i) {
            Py_XINCREF(name);
            if (!name || PyList_SetItem(made, sw_host_members(map, h)[i], name) < 0)
                ENGINE_CLEAR(made);
        }
    }
    return made;
}

/* Joins the other hosts and takes ownership of `wire`. On failure the communicator is destroyed. */
static sw_status join_hosts(comm_object *self, const int *host_of, const char *host,
                            const sw_wire *wire, sw_error *err)
{
    sw_comm *inside = self->comm, *whole = NULL;
    sw_identity own = {.pid = (int32_t)getpid()};
    snprintf(own.host, sizeof own.host, "%s", host);
    self->comm = NULL;
    self->connected = false; /* a concurrent close() stops it, as it stops connect() */
    sw_status status = SW_PY_WITHOUT_GIL(sw_hier_comm_create(inside, self->rank, self->world_size,
                                                             host_of, &own, wire, &whole, err));
    self->comm = whole;
    self->connected = self->spans_hosts = status == SW_OK;
    self->closed |= status != SW_OK;
    return status;
}

/* Reads the host of each rank and makes the wire. Returns false with an exception. */
static bool read_map(comm_object *self, PyObject *map, PyObject *group, sw_py_table *host_of,
                     const sw_wire **wire)
{
    if (!sw_py_table_init(host_of, map, "extend host_of:i", sizeof(int), sw_py_fill_int, NULL))
        return false;
    if (host_of->count != (size_t)self->world_size)
        return sw_py_refuse(PyExc_ValueError,
                            "extend: host_of must have world_size = %d entries, got %zu",
                            self->world_size, host_of->count);
    if (group && group != Py_None)
        *wire = sw_py_wire_new(group);
    return !PyErr_Occurred();
}

PyObject *sw_py_comm_extend(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[3] = {{0}};
    SW_PY_TABLE host_of = {0};
    const sw_wire *wire = NULL;
    sw_error err;
    if (!sw_py_read("extend host_of:O host:s | $ wire:O", args, kwargs, a))
        return NULL;
    if (self->spans_hosts || self->group)
        return PyErr_Format(sw_py_state_of(op)->error,
                            "extend: the communicator has been extended already, or has one rank");
    if (self->users > (self->use.kind != SW_PY_FREE))
        return PyErr_Format(sw_py_state_of(op)->error,
                            "extend: arenas, reducers or a GPU's communicator use this "
                            "communicator already; extend it before they are made");
    if (!sw_py_comm_enter(self))
        return NULL;
    if (!read_map(self, a[0].o, a[2].o, &host_of, &wire)) {
        sw_py_comm_leave(self);
        return NULL;
    }
    sw_status status = join_hosts(self, host_of.rows, a[1].s, wire, &err);
    SW_PY_OWNED *by_rank = status == SW_OK ? introduced_hosts(self->comm) : NULL;
    if (by_rank)
        sw_py_set(&self->hosts, by_rank);
    else
        PyErr_Clear(); /* only messages would lack the names; real failures are raised below */
    return finish_join(self, status, &err);
}
