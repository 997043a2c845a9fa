package inventory

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"
)

// Errors of calls on one reservation or sale.
var (
	ErrNoSale          = errors.New("no such sale")
	ErrNotFound        = errors.New("no such reservation")
	ErrNotConfirmed    = errors.New("the reservation is not confirmed")
	ErrConfirmed       = errors.New("the reservation is confirmed")
	ErrPaymentMismatch = errors.New("the reservation was confirmed with another payment")
	ErrPaymentReused   = errors.New("the payment was used for another reservation")
	ErrNotOver         = errors.New("the sale cannot close yet")
	ErrBusy            = errors.New("units are locked by others for too long")
	ErrCorrupt         = errors.New("the rows contradict each other")

	errLapsed          = errors.New("a hold lapsed while it was being confirmed")
	errLoadedElsewhere = errors.New("the units before these are not loaded, another process loads too, or they are wanted no more")
	errHope            = errors.New("a claim hoped for new buyers and enough units, and must look")
)

// CommitError is a COMMIT that failed: the transaction may or may not have taken effect.
type CommitError struct{ Err error }

func (e *CommitError) Error() string { return fmt.Sprintf("committing, outcome unknown: %v", e.Err) }
func (e *CommitError) Unwrap() error { return e.Err }

// Class says what to do about a database error.
type Class int

// The classes of errors.
const (
	Other       Class = iota // a retry would fail again: a person, or a change of code, must mend it
	Conflict                 // rolled back by the server (deadlock, lock wait, duplicate key): run the transaction again
	Unavailable              // the server cannot be reached or refuses work now: try later
)

// Classify is the one table of database errors.
func Classify(err error) Class {
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		switch my.Number {
		case 1213, // ER_LOCK_DEADLOCK
			1205, // ER_LOCK_WAIT_TIMEOUT
			1062: // ER_DUP_ENTRY: another process inserted the same key first
			return Conflict
		case 1040, // ER_CON_COUNT_ERROR
			1053,       // ER_SERVER_SHUTDOWN
			1203, 1226, // ER_TOO_MANY_USER_CONNECTIONS, ER_USER_LIMIT_REACHED
			1290, 1792, 1836, // read-only: fail-over under way
			1317, 3024, // ER_QUERY_INTERRUPTED, ER_QUERY_TIMEOUT
			1021, 1114, // disk or table full
			2006, 2013, 4031: // server gone, through a proxy; idle for too long
			return Unavailable
		}
		return Other
	}
	var netErr net.Error
	switch {
	case errors.Is(err, errLapsed), errors.Is(err, errLoadedElsewhere), errors.Is(err, errHope):
		return Conflict
	case errors.Is(err, ErrBusy):
		return Unavailable
	case errors.Is(err, driver.ErrBadConn), errors.Is(err, mysql.ErrInvalidConn), errors.Is(err, io.EOF),
		errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &netErr), errors.Is(err, context.DeadlineExceeded):
		return Unavailable
	}
	return Other
}

// SetupError says what is wrong with the database and what to do. Reason is a CamelCase word for conditions.
type SetupError struct {
	Reason  string
	Message string
	Err     error // may be nil
}

// Reasons of SetupError.
const (
	ReasonInvalidDSN          = "InvalidDSN"
	ReasonUnreachable         = "DatabaseUnreachable"
	ReasonAccessDenied        = "AccessDenied"
	ReasonUnknownDatabase     = "UnknownDatabase"
	ReasonPermissionDenied    = "PermissionDenied"
	ReasonUnsupportedDatabase = "UnsupportedDatabase"
	ReasonUnsupportedEngine   = "UnsupportedEngine"
	ReasonNotDurable          = "NotDurable"
	ReasonNewerSchema         = "NewerSchema"
	ReasonReadOnly            = "ReadOnly"
	ReasonTooManyConnections  = "TooManyConnections"
	ReasonDiskFull            = "DiskFull"
	ReasonDatabaseError       = "DatabaseError"
)

func (e *SetupError) Error() string {
	if e.Err == nil {
		return e.Message
	}
	return fmt.Sprintf("%s (%v)", e.Message, e.Err)
}

func (e *SetupError) Unwrap() error { return e.Err }

// AsSetupError gives any database error as one that says what to do.
func AsSetupError(err error) *SetupError {
	var setup *SetupError
	if errors.As(err, &setup) {
		return setup
	}
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		switch my.Number {
		case 1045, 1698, 1251, 1862, 3118: // user, authentication, expired password, locked account
			return &SetupError{ReasonAccessDenied, "the server refuses the user or password: correct the Secret", err}
		case 1049:
			return &SetupError{ReasonUnknownDatabase, "the database does not exist: create it, or correct the Secret", err}
		case 1040, 1203, 1226: // of the server, of the user, of the user's account
			return &SetupError{ReasonTooManyConnections, "the server has no connection left: raise max_connections (or the user's limit), or lower reserver.replicas", err}
		case 1290, 1792, 1836: // ER_OPTION_PREVENTS_STATEMENT, transaction, mode
			return &SetupError{ReasonReadOnly, "the server is read-only: point the Secret at the primary, or SET GLOBAL read_only=0", err}
		case 1021, 1114, 1041, 3019: // disk full, table full
			return &SetupError{ReasonDiskFull, "the server has no room to write: free or add disk space; nothing was lost", err}
		case 1044, 1142, 1143, 1227: // to schema, table, column, operation
			return &SetupError{ReasonPermissionDenied, "the user lacks a permission: grant ALTER, CREATE, DELETE, INDEX, INSERT, SELECT and UPDATE on the database", err}
		}
	}
	if errors.Is(err, mysql.ErrMalformPkt) || errors.Is(err, mysql.ErrOldProtocol) {
		return &SetupError{ReasonUnsupportedDatabase, "the server does not speak MySQL's protocol: correct host and port in the Secret", err}
	}
	if Classify(err) == Unavailable {
		return &SetupError{ReasonUnreachable, "the server cannot be reached: check that it runs, and host and port in the Secret", err}
	}
	return &SetupError{ReasonDatabaseError, "the database answered with an error", err}
}
