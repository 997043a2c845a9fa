// Command manager is the FlashSale operator: it takes FlashSale objects through their life.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers"
)

func main() {
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintf(os.Stderr, "manager: %v\n", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	metrics       string
	secureMetrics bool
	probes        string
	elect         bool
	electIn       string
	namespaces    string
	image         string
}

func run(ctx context.Context) error {
	var o options
	flag.StringVar(&o.metrics, "metrics-bind-address", ":8443", "address of the metrics; 0 turns them off")
	flag.BoolVar(&o.secureMetrics, "metrics-secure", true, "serve metrics over HTTPS, to those the API server authorizes")
	flag.StringVar(&o.probes, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	flag.BoolVar(&o.elect, "leader-elect", true, "run only while holding the lease, so that several replicas can stand by")
	flag.StringVar(&o.electIn, "leader-election-namespace", "", "namespace of the lease; default: that of this pod")
	flag.StringVar(&o.namespaces, "namespaces", "", "look after FlashSales in these namespaces only, comma separated; default: all")
	flag.StringVar(&o.image, "reserver-image", "", "image of the reservation pods; default: the image of this pod")
	zapOptions := zap.Options{}
	zapOptions.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&zapOptions)))

	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), sales.AddToScheme(scheme)); err != nil {
		return err
	}
	metrics := metricsserver.Options{BindAddress: o.metrics, SecureServing: o.secureMetrics}
	if o.secureMetrics {
		metrics.FilterProvider = filters.WithAuthenticationAndAuthorization
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("finding the cluster: %w", err)
	}
	routes, err := controllers.HasGatewayAPI(config)
	if err != nil {
		return err
	}
	cached := cache.Options{ByObject: controllers.Cached(routes)}
	for _, namespace := range strings.FieldsFunc(o.namespaces, func(r rune) bool { return r == ',' || r == ' ' }) {
		if cached.DefaultNamespaces == nil {
			cached.DefaultNamespaces = map[string]cache.Config{}
		}
		cached.DefaultNamespaces[namespace] = cache.Config{}
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                        scheme,
		Metrics:                       metrics,
		HealthProbeBindAddress:        o.probes,
		LeaderElection:                o.elect,
		LeaderElectionID:              "manager.sales.flashsale.dev",
		LeaderElectionReleaseOnCancel: true, // the process ends right after
		LeaderElectionNamespace:       o.electIn,
		Cache:                         cached,
	})
	if err != nil {
		return fmt.Errorf("connecting to the cluster: %w", err)
	}
	if o.image == "" {
		if o.image, err = ownImage(ctx, mgr.GetAPIReader()); err != nil {
			return err
		}
	}
	reconciler := &controllers.FlashSaleReconciler{
		Client:     mgr.GetClient(),
		Direct:     mgr.GetAPIReader(),
		Events:     mgr.GetEventRecorder("flashsale-manager"),
		Databases:  controllers.NewDatabases(),
		HTTPRoutes: routes,
		Namespace:  os.Getenv("POD_NAMESPACE"),
		Image:      o.image,
	}
	if err := reconciler.SetupWithManager(mgr); err != nil {
		return err
	}
	if err := errors.Join(mgr.AddHealthzCheck("ping", healthz.Ping), mgr.AddReadyzCheck("ping", healthz.Ping)); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

// ownImage reads the image of this pod, so that a sale's pods are always of the operator's own version.
func ownImage(ctx context.Context, reader client.Reader) (string, error) {
	name, namespace := os.Getenv("POD_NAME"), os.Getenv("POD_NAMESPACE")
	if name == "" || namespace == "" {
		return "", errors.New("outside a pod (POD_NAME and POD_NAMESPACE are not set), --reserver-image is needed")
	}
	pod := &corev1.Pod{}
	if err := reader.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod); err != nil {
		return "", fmt.Errorf("reading this pod's image: %w", err)
	}
	for _, c := range pod.Spec.Containers {
		if c.Name == "manager" { // others may have been injected
			return c.Image, nil
		}
	}
	return "", errors.New("this pod has no container named manager: --reserver-image is needed")
}
