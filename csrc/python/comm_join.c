/* comm_join.c - how a HostComm joins its peers: connect() joins those of its host; extend() joins
 * other hosts, given a map of hosts and a wire between their carriers. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/shm.h"
#include "python/engine.h"

/* The arguments of connect(), all read before the rank joins. */
typedef struct join_request {
    PyObject *addresses, *hosts; /* owned; one entry per member */
    const char **address;        /* owned array; the lists own the strings */
    int *members;                /* owned; NULL: all ranks */
    int count;
} join_request;

static void join_request_fini(join_request *request)
{
    Py_XDECREF(request->addresses);
    Py_XDECREF(request->hosts);
    free(request->address);
    free(request->members);
}

/* Reads a sequence of integers into an array that the caller owns. Returns NULL with an exception.
 */
static int *read_numbers(PyObject *sequence, Py_ssize_t *count)
{
    PyObject *list = PySequence_List(sequence);
    *count = list ? PyList_Size(list) : 0;
    int *made = list ? calloc((size_t)*count + 1, sizeof *made) : NULL;
    for (Py_ssize_t i = 0; made && i < *count; ++i)
        made[i] = (int)PyLong_AsLong(PyList_GetItem(list, i));
    Py_XDECREF(list);
    if (!made && !PyErr_Occurred())
        PyErr_NoMemory();
    if (PyErr_Occurred()) {
        free(made);
        return NULL;
    }
    return made;
}

/* Reads the ranks of this host, which are ascending and include this one. */
static int read_members(join_request *request, int rank, int world_size, PyObject *members)
{
    Py_ssize_t count;
    bool has_own = false, ascends = true;
    request->count = world_size;
    if (members == Py_None)
        return 0;
    request->members = read_numbers(members, &count);
    if (!request->members)
        return -1;
    request->count = (int)count;
    for (int i = 0; i < request->count; ++i) {
        int before = i > 0 ? request->members[i - 1] : -1;
        has_own |= request->members[i] == rank;
        ascends &= request->members[i] > before && request->members[i] < world_size;
    }
    if (!has_own || !ascends) {
        PyErr_Format(
            PyExc_ValueError,
            "connect: members must be ranks in [0, %d), ascending, with rank %d among them",
            world_size, rank);
        return -1;
    }
    return 0;
}

static int read_addresses(join_request *request, PyObject *addresses, PyObject *hosts)
{
    int count = request->count;
    request->addresses = PySequence_List(addresses);
    request->hosts = PySequence_List(hosts);
    request->address = calloc((size_t)count, sizeof *request->address);
    if (!request->addresses || !request->hosts || !request->address)
        return -1;
    if (PyList_Size(request->addresses) != count || PyList_Size(request->hosts) != count) {
        PyErr_Format(PyExc_ValueError, "connect: addresses and hosts must have %d entries", count);
        return -1;
    }
    for (int r = 0; r < count; ++r) {
        request->address[r] = PyUnicode_AsUTF8AndSize(PyList_GetItem(request->addresses, r), NULL);
        if (!request->address[r])
            return -1;
    }
    return 0;
}

/* Returns the host name of each rank, empty for ranks of other hosts; NULL with an exception. */
static PyObject *hosts_by_rank(const join_request *request, int world_size)
{
    if (!request->members) {
        Py_INCREF(request->hosts);
        return request->hosts;
    }
    PyObject *made = PyList_New(world_size);
    for (int r = 0, i = 0; made && r < world_size; ++r) {
        bool is_here = i < request->count && request->members[i] == r;
        PyObject *name = is_here ? PyList_GetItem(request->hosts, i++) : PyUnicode_FromString("");
        if (is_here)
            Py_INCREF(name);
        if (!name || PyList_SetItem(made, r, name) < 0)
            Py_CLEAR(made);
    }
    return made;
}

static void set_hosts(comm_object *self, PyObject *hosts)
{
    PyObject *before = self->hosts;
    self->hosts = hosts;
    Py_XDECREF(before);
}

/* Joins the ranks of this host. No other thread can use the communicator meanwhile, but hooks run,
 * and close() may stop it. */
static sw_status join_host(comm_object *self, const join_request *request, const uint8_t *secret,
                           sw_error *err)
{
    sw_comm *comm = self->comm;
    sw_status status = SW_OK;
    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (request->members)
        status = sw_shm_comm_narrow(comm, request->members, request->count, err);
    if (status == SW_OK)
        status = sw_shm_comm_connect(comm, request->address, secret, err);
    Py_END_ALLOW_THREADS
    self->comm = comm;
    self->connected = status == SW_OK;
    return status;
}

static PyObject *finish_join(comm_object *self, sw_status status, sw_error *err)
{
    if (status == SW_OK && self->closed) {
        sw_error_set(err, SW_E_STATE, -1,
                     "the communicator of rank %d was closed while it joined its peers",
                     self->rank);
        status = err->status;
    }
    return sw_py_comm_finish(self, status, err);
}

PyObject *sw_py_comm_connect(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"addresses", "secret", "hosts", "members", NULL};
    comm_object *self = (comm_object *)op;
    PyObject *addresses, *hosts, *members = Py_None;
    const char *secret;
    Py_ssize_t secret_bytes;
    join_request request = {.count = 0};
    sw_error err;
    sw_status status = SW_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#O|$O:connect", names, &addresses, &secret,
                                     &secret_bytes, &hosts, &members))
        return NULL;
    if (secret_bytes != SW_SHM_SECRET_BYTES)
        return PyErr_Format(PyExc_ValueError, "connect: secret must have %d bytes, got %zd",
                            SW_SHM_SECRET_BYTES, secret_bytes);
    if (!sw_py_comm_enter_to_join(self))
        return NULL;
    PyObject *by_rank = NULL;
    if (read_members(&request, self->rank, self->world_size, members) == 0 &&
        read_addresses(&request, addresses, hosts) == 0)
        by_rank = hosts_by_rank(&request, self->world_size);
    if (!by_rank) {
        join_request_fini(&request);
        sw_py_comm_leave(self);
        return NULL;
    }
    set_hosts(self, by_rank);
    if (!self->group)
        status = join_host(self, &request, (const uint8_t *)secret, &err);
    join_request_fini(&request);
    return finish_join(self, status, &err);
}

/* Returns the host name of each rank as the carriers exchanged them; NULL with an exception. */
static PyObject *introduced_hosts(const sw_comm *comm)
{
    const sw_host_map *map = sw_hier_comm_map(comm);
    PyObject *made = PyList_New(map->world_size);
    for (int h = 0; made && h < map->host_count; ++h) {
        PyObject *name = PyUnicode_DecodeUTF8(
            sw_hier_comm_host(comm, h), (Py_ssize_t)strlen(sw_hier_comm_host(comm, h)), "replace");
        for (int i = 0; name && made && i < sw_host_size(map, h); ++i) {
            Py_INCREF(name);
            if (PyList_SetItem(made, sw_host_members(map, h)[i], name) < 0)
                Py_CLEAR(made);
        }
        if (!name)
            Py_CLEAR(made);
        Py_XDECREF(name);
    }
    return made;
}

/* Joins the other hosts and takes ownership of `wire`. On failure the communicator is destroyed. */
static sw_status join_hosts(comm_object *self, const int *host_of, const char *host,
                            const sw_wire *wire, sw_error *err)
{
    sw_comm *inside = self->comm, *whole = NULL;
    sw_identity own = {.pid = (int32_t)getpid()};
    sw_status status;
    snprintf(own.host, sizeof own.host, "%s", host);
    self->comm = NULL;
    self->connected = false; /* a concurrent close() stops it, as it stops connect() */
    Py_BEGIN_ALLOW_THREADS
    status =
        sw_hier_comm_create(inside, self->rank, self->world_size, host_of, &own, wire, &whole, err);
    Py_END_ALLOW_THREADS
    self->comm = whole;
    self->connected = self->spans_hosts = status == SW_OK;
    self->closed |= status != SW_OK;
    return status;
}

PyObject *sw_py_comm_extend(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"host_of", "host", "wire", NULL};
    comm_object *self = (comm_object *)op;
    PyObject *map, *group = Py_None;
    const char *host;
    Py_ssize_t count;
    const sw_wire *wire = NULL;
    sw_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|$O:extend", names, &map, &host, &group))
        return NULL;
    if (self->spans_hosts || self->group) {
        PyErr_SetString(sw_py_state_of(op)->error,
                        "extend: the communicator has been extended already, or has one rank");
        return NULL;
    }
    if (!sw_py_comm_enter(self))
        return NULL;
    int *host_of = read_numbers(map, &count);
    if (host_of && count != self->world_size) {
        PyErr_Format(PyExc_ValueError, "extend: host_of must have world_size = %d entries, got %zd",
                     self->world_size, count);
        count = -1;
    }
    if (!host_of || count < 0 || (group != Py_None && !(wire = sw_py_wire_new(group)))) {
        free(host_of);
        sw_py_comm_leave(self);
        return NULL;
    }
    sw_status status = join_hosts(self, host_of, host, wire, &err);
    free(host_of);
    PyObject *by_rank = status == SW_OK ? introduced_hosts(self->comm) : NULL;
    if (by_rank)
        set_hosts(self, by_rank);
    else
        PyErr_Clear(); /* only messages would lack the names; real failures are raised below */
    return finish_join(self, status, &err);
}
