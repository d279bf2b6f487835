/* comm_join.c - how a HostComm finds its peers: which of them it can call, and the join itself,
 * over one host's memory or over a map of hosts. */
#include <stdlib.h>
#include <string.h>

#include "comm/shm.h"
#include "python/engine.h"

/* What connect() was given, read before anything is joined. */
typedef struct join_request {
    PyObject *addresses, *hosts; /* owned lists */
    const char **address;        /* owned; the texts belong to the list */
    int *host_of, *members;      /* owned; NULL: one host */
    sw_identity own;
    int member_count;
} join_request;

static void join_request_fini(join_request *join)
{
    Py_XDECREF(join->addresses);
    Py_XDECREF(join->hosts);
    free(join->address);
    free(join->host_of);
    free(join->members);
}

/* Which rank is on which host, and who they are. */
static int read_hosts(join_request *join, int rank, int world_size, PyObject *host_of,
                      PyObject *pids)
{
    PyObject *map = PySequence_List(host_of), *list = map ? PySequence_List(pids) : NULL;
    int failed = !list || PyList_Size(map) != world_size || PyList_Size(list) != world_size;
    join->host_of = calloc((size_t)world_size, sizeof *join->host_of);
    join->members = calloc((size_t)world_size, sizeof *join->members);
    failed |= !join->host_of || !join->members;
    for (int r = 0; !failed && r < world_size; ++r) {
        join->host_of[r] = (int)PyLong_AsLong(PyList_GetItem(map, r));
        failed = PyErr_Occurred() != NULL;
    }
    for (int r = 0; !failed && r < world_size; ++r)
        if (join->host_of[r] == join->host_of[rank])
            join->members[join->member_count++] = r;
    const char *host =
        failed ? NULL : PyUnicode_AsUTF8AndSize(PyList_GetItem(join->hosts, rank), NULL);
    join->own.pid = failed ? 0 : (int32_t)PyLong_AsLong(PyList_GetItem(list, rank));
    strncpy(join->own.host, host ? host : "", sizeof join->own.host - 1);
    failed |= PyErr_Occurred() != NULL;
    Py_XDECREF(map);
    Py_XDECREF(list);
    if (failed && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError,
                     "connect: host_of and pids must have world_size = %d entries", world_size);
    return failed ? -1 : 0;
}

static int read_addresses(join_request *join, int world_size, PyObject *addresses, PyObject *hosts)
{
    join->addresses = PySequence_List(addresses);
    join->hosts = PySequence_List(hosts);
    join->address = calloc((size_t)world_size, sizeof *join->address);
    if (!join->addresses || !join->hosts || !join->address)
        return -1;
    if (PyList_Size(join->addresses) != world_size || PyList_Size(join->hosts) != world_size) {
        PyErr_Format(PyExc_ValueError,
                     "connect: addresses and hosts must have world_size = %d entries", world_size);
        return -1;
    }
    for (int r = 0; r < world_size; ++r) {
        join->address[r] = PyUnicode_AsUTF8AndSize(PyList_GetItem(join->addresses, r), NULL);
        if (!join->address[r])
            return -1;
    }
    return 0;
}

/* Joins the ranks of this host. */
static sw_status join_host(sw_comm *inside, const join_request *join, const uint8_t *secret,
                           sw_error *err)
{
    int world_size = inside->world_size;
    const char **address = calloc((size_t)world_size, sizeof *address);
    sw_status status = SW_E_MEMORY;
    if (!address)
        SW_FAIL(err, status, "no memory to join %d ranks", world_size);
    for (int i = 0; i < join->member_count; ++i)
        address[i] = join->address[join->members[i]];
    status = sw_shm_comm_narrow(inside, join->members, join->member_count, err);
    if (status == SW_OK)
        status = sw_shm_comm_connect(inside, address, secret, err);
    free(address);
    return status;
}

/* And through `wire`, which is given up, the other hosts. *comm becomes what has joined, or NULL
 * where nothing is left of it. */
static sw_status join_hosts(sw_comm **comm, const join_request *join, const uint8_t *secret,
                            const sw_wire *wire, sw_error *err)
{
    sw_comm *inside = *comm;
    int rank = inside->rank, world_size = inside->world_size;
    sw_status status = join_host(inside, join, secret, err);
    if (status != SW_OK) {
        if (wire)
            wire->release(wire->context);
        return status;
    }
    *comm = NULL; /* taken over, also on failure */
    return sw_hier_comm_create(inside, rank, world_size, join->host_of, &join->own, wire, comm,
                               err);
}

/* Nobody else sees the communicator while it joins: hooks may run, and close() may ask for the end.
 */
static sw_status join(comm_object *self, const join_request *request, const uint8_t *secret,
                      bool spans, const sw_wire *wire, sw_error *err)
{
    sw_comm *comm = self->comm;
    sw_status status;
    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS
    status = spans ? join_hosts(&comm, request, secret, wire, err)
                   : sw_shm_comm_connect(comm, request->address, secret, err);
    Py_END_ALLOW_THREADS
    self->comm = comm;
    self->connected = status == SW_OK;
    self->spans_hosts = spans && status == SW_OK;
    return status;
}

PyObject *sw_py_comm_connect(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"addresses", "secret", "hosts", "host_of", "pids", "wire", NULL};
    comm_object *self = (comm_object *)op;
    PyObject *addresses, *hosts, *host_of = Py_None, *pids = Py_None, *group = Py_None;
    const char *secret;
    Py_ssize_t secret_bytes;
    join_request request = {.member_count = 0};
    const sw_wire *wire = NULL;
    sw_error err;
    sw_status status = SW_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#O|$OOO:connect", names, &addresses, &secret,
                                     &secret_bytes, &hosts, &host_of, &pids, &group))
        return NULL;
    if (secret_bytes != SW_SHM_SECRET_BYTES)
        return PyErr_Format(PyExc_ValueError, "connect: secret must have %d bytes, got %zd",
                            SW_SHM_SECRET_BYTES, secret_bytes);
    if (!sw_py_comm_enter_to_join(self))
        return NULL;
    bool spans = host_of != Py_None && !self->group;
    if (read_addresses(&request, self->world_size, addresses, hosts) < 0 ||
        (spans && read_hosts(&request, self->rank, self->world_size, host_of, pids) < 0) ||
        (spans && group != Py_None && !(wire = sw_py_wire_new(group)))) {
        join_request_fini(&request);
        sw_py_comm_leave(self);
        return NULL;
    }
    Py_INCREF(request.hosts);
    PyObject *before = self->hosts;
    self->hosts = request.hosts;
    Py_XDECREF(before);
    if (!self->group)
        status = join(self, &request, (const uint8_t *)secret, spans, wire, &err);
    join_request_fini(&request);
    if (status == SW_OK && self->closed) {
        sw_error_set(&err, SW_E_STATE, -1,
                     "the communicator of rank %d was closed while it joined its peers",
                     self->rank);
        status = err.status;
    }
    sw_py_comm_leave(self);
    if (status != SW_OK)
        return sw_py_raise(sw_py_state_of(op), &err, self);
    Py_RETURN_NONE;
}

/* Which ranks listen where this process can call them. */
PyObject *sw_py_comm_probe(PyObject *op, PyObject *addresses)
{
    comm_object *self = (comm_object *)op;
    join_request join = {.member_count = 0};
    if (!self->comm || self->closed || self->connected) {
        PyErr_SetString(sw_py_state_of(op)->error,
                        "probe: the communicator is closed or has joined already");
        return NULL;
    }
    int world_size = self->world_size;
    bool *reached = calloc((size_t)world_size, sizeof *reached);
    PyObject *made = NULL;
    if (!reached) {
        PyErr_NoMemory();
    } else if (read_addresses(&join, world_size, addresses, addresses) == 0) {
        sw_shm_comm_probe(self->comm, join.address, reached);
        made = PyBytes_FromStringAndSize((const char *)reached, world_size);
    }
    join_request_fini(&join);
    free(reached);
    return made;
}
