package inventory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// What is wrong with a database is said in a word for conditions and a sentence for people, and nothing is changed.
func TestSetupErrors(t *testing.T) {
	good := testmysql.DSN(t)
	admin := testmysql.Admin(t)
	dsn := func(change func(user, password, addr, db *string)) string {
		cfg := testmysql.Config(t)
		change(&cfg.User, &cfg.Passwd, &cfg.Addr, &cfg.DBName)
		return cfg.FormatDSN()
	}
	readOnly := "ro_" + fmt.Sprint(time.Now().UnixNano()%1e9)
	for _, q := range []string{"CREATE USER " + readOnly + " IDENTIFIED BY 'right'", "GRANT SELECT ON *.* TO " + readOnly} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = admin.ExecContext(ctx, "DROP USER "+readOnly) })
	myISAM := testmysql.Open(t, good)
	if _, err := myISAM.DB().ExecContext(ctx, "CREATE TABLE flashsale_unit (sale_id BINARY(16), unit_no INT, state INT) ENGINE=MyISAM"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, dsn, want string }{
		{"not a DSN", "mysql://root@host/db", inventory.ReasonInvalidDSN},
		{"no database", dsn(func(_, _, _, db *string) { *db = "" }), inventory.ReasonInvalidDSN},
		{"nobody listens", dsn(func(_, _, addr, _ *string) { *addr = "127.0.0.1:1" }), inventory.ReasonUnreachable},
		{"wrong password", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "wrong" }), inventory.ReasonAccessDenied},
		{"unknown database", dsn(func(_, _, _, db *string) { *db = "no_such_db" }), inventory.ReasonUnknownDatabase},
		{"no permission to create tables", dsn(func(user, password, _, _ *string) { *user, *password = readOnly, "right" }), inventory.ReasonPermissionDenied},
		{"tables without row locks", good, inventory.ReasonUnsupportedEngine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			short, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			store, err := inventory.Open(inventory.Options{DSN: tt.dsn})
			if err == nil {
				defer func() { _ = store.Close() }()
				_, err = store.Setup(short)
			}
			var setup *inventory.SetupError
			if !errors.As(err, &setup) || setup.Reason != tt.want {
				t.Errorf("error %v, want reason %s", err, tt.want)
			}
		})
	}
}
